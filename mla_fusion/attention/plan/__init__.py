"""What a plan is, who makes it, and what every kernel knows of it and of its device."""
