"""Train and test from the command line; import no host library."""
