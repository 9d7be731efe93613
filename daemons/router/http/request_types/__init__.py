"""Types of the bodies that endpoints take: their annotations are checks, bounds and the OpenAPI schema."""
