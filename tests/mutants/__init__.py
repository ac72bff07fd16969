"""Mutation tests of the modules that decide rounds: `make mutants`."""
