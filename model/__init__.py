"""The rules: definitions, tokens, instances, and what may happen to them. No clock, no thread, no database."""
