"""Service classes: SLOs for tenants, kept in the store and edited by administrators."""
