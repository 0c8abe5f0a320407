# @title Helpers: how the processes of a job ended, by code and by what they wrote
TELLING = [  # of what JAX's runtime writes on stderr before it aborts
    r"Shutdown barrier has failed",
    r"The following tasks are unhealthy \(stopped sending heartbeats\): \d+",
    r"the leader task was preempted/died/restarted unexpectedly",
    r"DEADLINE_EXCEEDED: Deadline Exceeded",
]

def stood_at(life):
    """The line of our program that its watchdog found it at."""
    frames = re.findall(r'File "(\S+)", line (\d+) in ', life.errors)
    path, number = [each for each in frames if each[0].startswith(str(disk))][0]
    return pathlib.Path(path).read_text().splitlines()[int(number) - 1].strip()

def reason(life):
    """How it ended: by whom, and in whose words."""
    said = " ".join(life.errors.split())
    if life.code == -signal.SIGABRT:
        found = [re.search(each, said) for each in TELLING]
        raised = re.search(r"^\w*Error: .*", life.errors, re.MULTILINE)
        first = f"{raised[0]}; then " if raised else ""
        return f"{first}aborted by JAX: {next(match[0] for match in found if match)}"
    if life.code == 1 and "Timeout (" in said:
        return f"ended by its watchdog at: {stood_at(life)}"
    if life.code == -signal.SIGKILL:
        return "killed"
    return "finished" if life.code == 0 else life.errors.strip().splitlines()[-1]

def table(lives_by_name):
    for name, lives in lives_by_name.items():
        print(name)
        for number, life in enumerate(lives):
            after = ", after finally" if "finally" in life.log else ""
            words = f"  process {number}, exit code {life.code}{after}: {reason(life)}"
            print(textwrap.fill(words, 86, subsequent_indent=" " * 4))
