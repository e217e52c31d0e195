{{/* The files of /etc/lazuli on every node. */}}
{{- define "lazuli.files" -}}
config.toml: |
  {{- with .Values.config }}
  {{- . | trim | nindent 2 }}
  {{ end }}
  [snapshotter]
  {{- if .Values.mirror.enabled }}

  [mirror]
  {{- with .Values.mirror.lazy }}
  lazy = {{ toJson . }}
  {{- end }}
  {{- end }}
  {{- with .Values.metrics.listen }}

  [metrics]
  listen = {{ toJson . }}
  {{- end }}
  {{- if .Values.p2p.enabled }}

  [p2p]
  engine = "dragonfly"
  proxy = {{ toJson .Values.p2p.proxy }}
  {{- with .Values.p2p.health }}
  health = {{ toJson . }}
  {{- end }}
  credentials = {{ .Values.p2p.credentials }}
  {{- with .Values.p2p.socket }}
  socket = {{ toJson . }}
  {{- end }}
  {{- end }}
{{- with .Values.policy }}
policy.toml: |
  {{- . | trim | nindent 2 }}
{{- end }}
{{- range $name, $text := .Values.files }}
{{ $name }}: {{ toJson $text }}
{{- end }}
{{- end }}
