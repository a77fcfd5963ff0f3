"""`moiety apply`: makes a deployment's classes, tenants, limits and prices what a file says, and nothing else.

document → spec (what the file wants) · current (what there is) → plan, a pure function → carry_out, over the admin API.
"""
