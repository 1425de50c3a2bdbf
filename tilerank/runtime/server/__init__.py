"""The HTTP process: serves APIs beside the ranks, without torch and without the model.

Order of the folders, each of which imports only those before it: link, http, chat, monitoring, web, apis, and app.py.
"""
