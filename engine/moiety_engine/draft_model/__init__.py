"""A second, small model that drafts what the first one verifies, or a layer of that one which foretells."""
