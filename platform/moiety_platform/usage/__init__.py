"""What each request cost: exactly one usage row a request, whatever its end."""
