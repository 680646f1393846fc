"""Shell completion: `isograd completion bash` prints a script, which asks `isograd completion words ...` at each tab.

    source <(isograd completion bash)                          in ~/.bashrc; zsh in ~/.zshrc
    isograd completion fish > ~/.config/fish/completions/isograd.fish

What can follow is read from the help of the command under way, and from the fields of a run's config.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence

SHELLS = {
    "bash": """_isograd() {
    local line=("${COMP_LINE:0:COMP_POINT}")
    local words; read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    local current="${words[-1]}" IFS=$'\\n'
    COMPREPLY=($(isograd completion words "${words[@]:1}" 2>/dev/null))
    [[ "$current" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${current%%=*}="}")  # bash cuts words at "="
    case "${COMPREPLY[0]}" in "") compopt -o default;; *=) compopt -o nospace;; esac
}
complete -F _isograd isograd""",
    "zsh": """#compdef isograd
_isograd() {
    local -a found
    found=("${(@f)$(isograd completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z "$found[1]" ]]; then _files; return; fi
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
}
if [[ "$funcstack[1]" == _isograd ]]; then  # read by compinit, from a file _isograd in fpath
    _isograd "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
    compdef _isograd isograd
fi""",
    "fish": "complete -c isograd -a '(isograd completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'",
}
WITH_FIELDS = (["train"], ["rehearse"], ["compare"], ["config", "show"])  # commands that set fields of a config


def candidates(words: Sequence[str], run: Callable[[list[str]], int]) -> list[str]:
    """What the last of `words` can become; empty: a file, or nothing known. run: the command line itself."""
    *before, current = words or [""]
    if before == ["new"]:
        from isograd.cli.recipes import recipes

        return [name for name in recipes() if name.startswith(current)]
    path = [word for word in before if re.fullmatch(r"[a-z][a-z-]*", word)][:2]
    text, verbs = "", []
    for depth in range(len(path), -1, -1):  # the longest beginning that is a command
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
            run([*path[:depth], "--help"])
        if text := out.getvalue():
            verbs = re.findall(r"^    ([a-z][a-z-]+)(?:  |$)", text, re.MULTILINE) if len(before) == depth else []
            break
    found = sorted(set(re.findall(r"--[a-z][a-z-]*", text))) if current[:1] == "-" else verbs
    if any(before[: len(command)] == command and len(before) > len(command) for command in WITH_FIELDS):
        from isograd.train.reading import fields

        found = [*(f"{name}=" for name in fields()), *found]
    return [word for word in found if word.startswith(current)]
