"""The same notebooks on other Pythons, with other releases, in Colab."""
