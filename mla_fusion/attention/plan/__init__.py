"""The plan of a decode, its planners, and the parts of both that every kernel reads."""
