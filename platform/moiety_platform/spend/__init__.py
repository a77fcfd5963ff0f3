"""Spend: what usage cost, by group and by day, with a forecast and with budgets."""
