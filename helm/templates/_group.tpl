{{/* The pod template of one group of a Ray cluster. */}}

{{/* dict "root" $ "group" .Values.router "component" "router" "flavour" "router"
     "resources" TEXT "probes" TEXT, and "leaves" true if the node may leave its cluster */}}
{{- define "topwork.rayPod" -}}
metadata:
  {{- include "topwork.podMetadata" . | nindent 2 }}
spec:
  {{- include "topwork.podSpec" . | nindent 2 }}
  containers:
    - name: ray
      {{- include "topwork.container" . | nindent 6 }}
      env:
        {{- include "topwork.rayEnvironment" .root | nindent 8 }}
        {{- include "topwork.environment" . | trim | nindent 8 }}
      ports:
        - {name: serve, containerPort: {{ .root.Values.service.port }}}
        - {name: agent, containerPort: 52365}
        - {name: metrics, containerPort: 8080}
        {{- if eq .component "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
        {{- end }}
      resources:
        {{- .resources | nindent 8 }}
      {{- .probes | nindent 6 }}
{{- end }}

{{- define "topwork.headPod" -}}
{{- $group := .Values.head }}
{{- include "topwork.rayPod" (dict
  "root" . "group" $group "component" "head" "flavour" "router"
  "resources" (toYaml $group.resources)
  "probes" (include "topwork.headProbes" .)) }}
{{- end }}

{{- define "topwork.routerPod" -}}
{{- $group := .Values.router }}
{{- $serving := include "topwork.servingProbes" (dict "root" . "ready" "/ready" "live" "proxy") }}
{{- include "topwork.rayPod" (dict
  "root" . "group" $group "component" "router" "flavour" "router" "leaves" true
  "resources" (toYaml $group.resources)
  "probes" (printf "%s\n%s" (include "topwork.startupProbe" .) $serving)) }}
{{- end }}

{{- define "topwork.schedulerPod" -}}
{{- $group := .Values.scheduler }}
{{- $serving := include "topwork.servingProbes" (dict "root" . "ready" "/health" "live" "ranks") }}
{{- include "topwork.rayPod" (dict
  "root" . "group" $group "component" "scheduler" "flavour" .Values.topwork.device "leaves" true
  "resources" (include "topwork.schedulerResources" .)
  "probes" (printf "%s\n%s" (include "topwork.startupProbe" .) $serving)) }}
{{- end }}

{{/* `ray start` of a group: what follows from the values, then what the values say. */}}
{{- define "topwork.startParams" -}}
{{- range $name, $value := merge (deepCopy .group.rayStartParams) .own }}
{{ $name | quote }}: {{ $value | quote }}
{{- end }}
{{- end }}
