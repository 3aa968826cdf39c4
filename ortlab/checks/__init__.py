"""Before and beside a training: doctor, pre-flight, self-test, demo, recipes."""
