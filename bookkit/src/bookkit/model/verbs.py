"""What `bookkit` can be asked for: by verb, a module with main(arguments), and what it does."""

VERBS = {  # in the order of a day's work
    "execute": ("run.execute", "execute the chapters whose code changed"),
    "compare": ("run.compare", "list the outputs that differ between two executions"),
    "site": ("site.build", "build the site in every language"),
    "figures": ("site.figures", "draw the book's figures from their programs"),
    "sync": ("words.sync", "write notebooks/ and shared cells from book/"),
    "po": ("words.po", "bring the catalogues for translators up to date"),
    "translations": ("words.report", "say what is translated, and what is broken"),
    "lint": ("lint.command", "check pages against the rules"),
    "faults": ("lint.faults", "plant each listed fault and see that its cell fails"),
    "publish-as": ("site.address", "write another address, branch or tag everywhere"),
    "colab": ("stacks.colab", "run every notebook as Colab would"),
    "run-notebook": ("stacks.notebook", "run one notebook, and write down what happened"),
    "second-compiler": (
        "stacks.second_compiler",
        "compile programs of the book for TPU too, and check what is stored",
    ),
}
