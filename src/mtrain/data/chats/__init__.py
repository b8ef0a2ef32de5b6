"""Chats: messages, templates, the loss mask of their tokens, and their samples."""
