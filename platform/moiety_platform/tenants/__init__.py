"""Tenants and their projects: who shares this deployment, in which class and with which weight."""
