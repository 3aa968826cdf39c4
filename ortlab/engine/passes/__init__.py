"""Changes to an exported graph before its gradient is built, and what is read from it there."""
