"""Role-based access control of the admin API: roles, and one table of the roles that each action allows.

Pure: no HTTP, no SQL.
"""
