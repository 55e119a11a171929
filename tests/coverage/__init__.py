"""What fuses on which model, which spelling and beside which neighbour; see __main__.py."""
