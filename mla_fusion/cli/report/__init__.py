"""`mla-fusion report`, and the graphs that were dumped beside a report."""
