"""Exports on disk for the next process, each under a key of everything that its trace could depend on."""
