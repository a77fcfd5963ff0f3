"""The admin API: the catalog of administered resources, and the router of all its controllers."""
