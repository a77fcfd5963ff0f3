"""Kit of administered resources: the declaration from which access rules, commands and `moiety apply` are derived.

A declaration is data. It imports neither the web framework nor SQL, so that commands start quickly.
"""
