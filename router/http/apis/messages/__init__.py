"""``/v1/messages`` in Anthropic's shape: its bodies, which become chats, and its answers. Pure."""
