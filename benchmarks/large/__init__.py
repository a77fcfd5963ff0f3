"""A store as it is after a month of many tenants: drawn requests, spans in the image of real ones, and bulk writes."""
