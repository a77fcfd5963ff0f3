"""From the admin API's JSON to data frames, one a table or chart. Pure; knows no page and no network."""
