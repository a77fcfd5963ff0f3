"""The dashboard: pages over the gateway's admin API. It uses only that HTTP API and no other part of Moiety."""
