"""Load of the served models' experts by layer, expert and tenant, queried from the engines."""
