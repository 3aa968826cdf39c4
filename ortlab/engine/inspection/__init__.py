"""What a pre-flight looks at in a build: values that are frozen, operators that are refused, and where they stand."""
