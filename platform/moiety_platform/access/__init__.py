"""Who may do what in the admin API: roles, and one table from action to those who may. Pure; knows no HTTP, no SQL."""
