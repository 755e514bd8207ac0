"""What people and scripts read of a plan: tables, differences, the report, the trace, exported source."""
