"""Role-based access control of the admin API: roles, and the actions with the roles that may perform them.

Pure: no HTTP, no SQL.
"""
