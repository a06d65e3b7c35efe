"""What a job does when something goes wrong while it trains; docs/checkpoints.md says it to users.

`policy` is what the script asks for, `guards` puts it to work.
"""
