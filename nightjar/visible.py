"""Text of others made harmless for terminals and pages."""


def visible(text: object, most: int = 300) -> str:
    """Return the text with control characters and marks of direction as escapes, such as \\u202e.

    It is cut off behind `most` characters. Markup stays as it is: whoever writes a page escapes it.
    """
    found = str(text)
    cut = f"{found[:most]}…" if len(found) > most else found
    return "".join(char if char.isprintable() else _escaped(char) for char in cut)


def visible_lines(text: object, most: int = 4_000) -> str:
    """Return the text with every line made visible; each is cut off behind `most` characters."""
    return "\n".join(visible(line, most) for line in str(text).split("\n"))


def _escaped(char: str) -> str:
    number = ord(char)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
