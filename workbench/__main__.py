"""`python -m workbench`, and what torchrun starts."""

from workbench.cli import main

if __name__ == "__main__":
    main()
