"""Sleep of idle engines, and their waking by requests."""
