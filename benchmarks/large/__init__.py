"""Generator of a month of many tenants: generated requests, spans modelled on real ones, and bulk writes."""
