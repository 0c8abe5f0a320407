"""What `bookkit` can be asked for: by verb, a module with main(arguments), and what it does."""

VERBS = {  # in the order of a day's work
    "execute": ("run.execute", "execute the chapters whose code changed"),
    "site": ("site.build", "build the site in every language"),
    "figures": ("site.figures", "draw the book's figures from their programs"),
    "sync": ("words.sync", "write notebooks/ and setup cells from book/"),
    "po": ("words.po", "bring the catalogues for translators up to date"),
    "translations": ("words.report", "say what is translated, and what is broken"),
    "lint": ("lint.command", "check pages against the rules"),
    "publish-as": ("site.publish_as", "write another address, branch or tag everywhere"),
    "second-compiler": (
        "compilers.second_compiler",
        "compile programs of the book for TPU too, and check what is stored",
    ),
}
