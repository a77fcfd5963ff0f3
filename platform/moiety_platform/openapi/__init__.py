"""OpenAPI documents: input and output of every route, derived from the types that decode and encode them."""
