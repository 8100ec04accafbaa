"""The vocabulary of the agent language. Any change produces other conversations, and requires a new training."""


def vocabulary(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


STEMS = vocabulary(
    "notes report todo draft budget recipe letter diary plan index summary invoice survey agenda memo roster ledger "
    "poem story speech lesson review journal outline schedule catalog manual guide contract receipt inventory backup "
    "archive sample result table figure chapter essay script record message address holiday garden kitchen travel music"
)

EXTENSIONS = ("txt", "md", "csv", "log")

CONFIGS = (
    "app",
    "server",
    "worker",
    "client",
    "cache",
    "router",
    "mailer",
    "proxy",
    "search",
    "billing",
    "auth",
    "queue",
)

FOLDERS = vocabulary(
    "docs src data home work old new shared public private tmp lib core tools web mail photos books team office"
)

WORDS = vocabulary(
    "lemon river stone candle window market winter silver forest bridge button pepper island mirror pocket thunder "
    "basket copper meadow ribbon lantern harbor pillow rocket saddle tunnel velvet walnut anchor barrel cactus dragon"
)

KEYS = vocabulary(
    "port host mode level limit delay retry batch color theme owner region depth width height budget timeout size"
)

SERVICES = ("worker", "server", "mailer", "router", "cache", "billing", "search", "auth")

RULES = (
    "Use one command at a time.",
    "Never delete a file.",
    "Keep answers short.",
    "Quote numbers exactly as the tool printed them.",
    "Stay inside the current folder.",
    "Do not guess: look first.",
    "Answer in English.",
    "Prefer simple commands.",
    "Do not change files unless the user asks.",
    "Name the file in the final answer.",
    "Do not use the network.",
    "The shell is bash on a small server.",
    "Wait for the output before the next command.",
    "Say so when a file does not exist.",
    "Finish with one sentence.",
    "The user reads only the final answer.",
)
