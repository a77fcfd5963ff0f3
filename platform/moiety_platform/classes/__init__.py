"""Service classes: what is promised to whom, kept in the store and edited by administrators."""
