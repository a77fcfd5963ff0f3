"""The OpenAPI: what every route takes and answers, derived from the types that decode and encode it."""
