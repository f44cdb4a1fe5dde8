"""The command line: flags and job files to a checked config. Standard library only, so that help comes at once.

========= =========================================================
parse     a command line and its job file become one config
settings  one value set in one place
job_file  TOML, read and written
values    text to typed values and back
names     every option by name, and what a wrong one may have meant
validate  what a parsed job may not say
usage     the text of ``-h``
========= =========================================================
"""
