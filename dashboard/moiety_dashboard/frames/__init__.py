"""Data frames of the admin API's JSON, one per table or chart. Pure; knows no page and no network."""
