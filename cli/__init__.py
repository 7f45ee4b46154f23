"""The command line: one file per verb, `main` maps errors to exit codes, `render` and `progress` write for people."""
