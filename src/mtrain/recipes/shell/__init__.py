"""A static reader of shell scripts: it runs nothing, and keeps what it cannot know as a gap."""
