"""Updates in backward, before the step that they belong to is agreed on (ADR 0013)."""
