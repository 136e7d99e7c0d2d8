"""Values: records, resources, outcomes and references, as immutable models."""
