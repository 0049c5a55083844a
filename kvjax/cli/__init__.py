"""The `kvjax` command."""
