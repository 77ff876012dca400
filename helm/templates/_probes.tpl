{{/* Probes by kind of pod. Ray's agent answers for raylet and, on the head, for GCS; files/probe.py
     asks Serve and the ranks as well. */}}

{{- define "topwork.rayProbe" -}}
httpGet:
  path: /api/healthz
  port: agent
periodSeconds: 5
timeoutSeconds: 4
{{- end }}

{{- define "topwork.startupProbe" -}}
startupProbe:
  {{- include "topwork.rayProbe" . | nindent 2 }}
  failureThreshold: {{ div .Values.probes.startSeconds 5 | max 1 }}
{{- end }}

{{- define "topwork.headProbes" -}}
{{ include "topwork.startupProbe" . }}
readinessProbe:
  {{- include "topwork.rayProbe" . | nindent 2 }}
  failureThreshold: {{ div .Values.probes.unreadySeconds 5 | max 1 }}
livenessProbe:
  {{- include "topwork.rayProbe" . | nindent 2 }}
  failureThreshold: 12
{{- end }}

{{/* A pod that serves: dict "root" $ "ready" "/ready" "live" a mode of probe.py. */}}
{{- define "topwork.servingProbes" -}}
readinessProbe:
  httpGet:
    path: {{ .ready }}
    port: serve
  periodSeconds: 5
  timeoutSeconds: 4
  failureThreshold: {{ div .root.Values.probes.unreadySeconds 5 | max 1 }}
livenessProbe:
  exec:
    command:
      - python3
      - -IS
      - /etc/topwork/probe/probe.py
      - {{ .live }}
      - {{ .root.Values.service.port | quote }}
  periodSeconds: 15
  timeoutSeconds: 10
  failureThreshold: {{ div .root.Values.probes.unhealthySeconds 15 }}
{{- end }}
