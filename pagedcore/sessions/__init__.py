"""Conversations that wait, fork and move between processes."""
