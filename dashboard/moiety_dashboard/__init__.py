"""The dashboard: pages over the gateway's admin API. Knows that API over HTTP and nothing else of Moiety."""
